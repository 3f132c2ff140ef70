"""Rows and columns, their wire format, and sources of prompts."""
