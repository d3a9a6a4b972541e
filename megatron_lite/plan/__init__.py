"""What a run will hold and send, before it runs: arithmetic over layouts, records and plans."""
