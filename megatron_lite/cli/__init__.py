"""The command line: one file per subcommand, each with ``run(argv) -> exit code``, imported when it is asked for."""
