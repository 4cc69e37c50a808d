"""Choosing how a model is spread over devices. No torch."""
