"""Volumes: crops of scans."""
