"""Judged traces -> rows that an algorithm can learn from."""
