"""Stored models loaded, exported, removed, and made anew."""
