"""When a block gets another instance or gives one back (BL-24)."""
