"""Training on text: data, loop, runs and samples."""
