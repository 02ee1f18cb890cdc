"""The command line: verbs, options, tables."""
