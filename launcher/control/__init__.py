"""What users do to jobs that they launched: end them, hold them back, look inside."""
