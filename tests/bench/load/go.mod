module shalekv.dev/tests/load

go 1.25.0

require golang.org/x/net v0.58.0

require golang.org/x/text v0.41.0 // indirect
