"""Text for people: plans, differences, explanations."""
