"""Attention on tiles: its plan, four ways through it, and multi-head attention."""
