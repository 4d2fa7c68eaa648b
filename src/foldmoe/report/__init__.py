"""What people read: tables, plots and one self-contained page."""
