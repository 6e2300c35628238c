"""Images: recipes, builds, the squashfs files that nodes start, and the store that holds them."""
