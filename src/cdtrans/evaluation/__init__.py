"""The only room that sees an answer key."""
