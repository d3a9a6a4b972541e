"""Ranks: where each one stands (``layout``), how it learns that (``local``), and how ranks talk (``mesh``, ``collectives``)."""
