"""What a `Timeline` or a run looks like in other forms."""
