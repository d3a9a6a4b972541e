"""Checkpoints in full-tensor coordinates: saved in one layout, loaded in any other. Nothing stored can execute."""
