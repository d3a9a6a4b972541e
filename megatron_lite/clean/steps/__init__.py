"""The steps of a cleaning pipeline: a file for each, named as in the YAML file, and what those files share."""
