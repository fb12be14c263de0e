"""scripts/load: a server of a tiny compiled model under load and faults, on loopback only.

__main__       the command line
mixed          many requests of mixed lengths, some of which leave
malformed      bodies that must be refused, beside a good stream
faults         a device that fails or stalls, a reader that stalls
memory         does the process grow over many requests
target         the model, its bundle, and servers of it
client         one request, and all that came back
checks         what must hold of answers and of an idle server
"""
