"""The command line. One file a command; the only code that prints."""
