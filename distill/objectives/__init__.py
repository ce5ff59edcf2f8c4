"""The training objectives: what a packed step feeds, which rows it reads, and its loss."""
