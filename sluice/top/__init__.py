"""`sluice top`: the dashboard's figures in a terminal."""
