"""Crops of scans: images and label maps in two and three dims."""
