"""Rows and columns, their wire format, and sources of prompts.

file ──records─▶ ──conversions, sources──▶ examples ─templates, chat──▶ token ids
    ─prompts──▶ tables, mapped by all processes
tables ──loader─▶ rows of admitted prompts
    ──packing─▶ ranks and micro-batches           codec, messages: rows and messages as bytes
"""
