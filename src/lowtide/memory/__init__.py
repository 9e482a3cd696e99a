"""Record and describe a step's memory over time. Nothing here changes the program that it observes."""
