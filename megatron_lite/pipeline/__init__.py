"""Pipelines: a schedule is data that is verified before it runs (``schedules``, ``lower``, ``verify``, ``runtime``)."""
