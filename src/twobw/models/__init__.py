"""Models: each is a list of layers, built one by one on the rank that owns them."""
