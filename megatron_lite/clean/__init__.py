"""From dirty text to a clean corpus: a streaming pipeline of named steps."""
