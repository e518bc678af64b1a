"""What people read: a plan as text. Reads plan records and nothing above them."""
