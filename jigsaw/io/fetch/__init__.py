"""Where stored bytes come from: disk, object stores, and how they are fetched ahead."""
