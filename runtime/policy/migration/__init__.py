"""Estimate what moving K and V costs, decide where it meets, and what it recomputes from (BL-16 to BL-18)."""
