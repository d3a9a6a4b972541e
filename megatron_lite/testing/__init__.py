"""What tests of parallel programs need: a pool of real ranks, the equivalence matrix, no network."""
