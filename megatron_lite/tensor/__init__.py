"""Tensors that know their place in the whole model: specs, addressed randomness, split layers, the split loss."""
