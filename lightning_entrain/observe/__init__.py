"""What happened: timelines, spread measures and reports."""
