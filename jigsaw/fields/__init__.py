"""Fields on grids: from one latitude-longitude grid to another, and inference by sliding windows."""
