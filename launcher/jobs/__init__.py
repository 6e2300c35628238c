"""The jobs of launches: find them, ask about them, act on them."""
