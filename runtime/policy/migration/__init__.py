"""What a move of K and V costs, where it stops, what it recomputes from (BL-16 to BL-18)."""
