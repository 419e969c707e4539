"""What the scheduler does by the clock or on order: scaling, balancing, locality, pauses."""
