"""Models: what one is (protocol), the transformer's blocks, GPT and Llama, and their names in other checkpoints."""
