"""Why a job ended, and what follows: a table of rules, for the job itself and for those who look back."""
