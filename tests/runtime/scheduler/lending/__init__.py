"""Tests of loans of page sets to devices that are not on a sequence's path."""
