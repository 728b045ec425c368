"""`tandem profile`: what each node of a server does with its time, as a table, JSON, a picture and a trace."""
