"""`inject_fault`, where later versions than 0.5 have it. In 0.4 this is `inprocess.tools`."""
