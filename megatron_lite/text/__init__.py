"""From files of text to token files: reading inputs, tokenizers, preprocessing. Without torch."""
