"""scripts/clients: clients that others wrote, unmodified, against shark-serve on this machine.

__main__       the command line, and the server
clients        each client: how it is called, and what it must say
environments   an environment for each, in .cache/clients
openai_client  what is done with the openai package, in its own environment
task           a small local task for lm_eval
"""
