"""Tiles that meet: one layout for the operands of a function, and gradients of plain ones."""
