"""Ranks: where each stands (``layout``), how it learns that (``local``), how they talk (``mesh``, ``collectives``)."""
