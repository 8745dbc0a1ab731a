"""Bringing what was trained to where it is asked, and proving that it answers there."""
