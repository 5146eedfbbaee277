"""Volumes: crops of scans, and inference by sliding windows."""
