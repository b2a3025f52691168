// Load on a server that speaks gRPC without TLS, at little cost for the client.
//
// It repeats calls of one method with prepared requests, a given number in flight, over some
// connections, and prints figures as JSON. It writes HTTP/2 frames itself: one goroutine serves a
// connection, reads all replies that are there, and sends the calls that follow them in one write.
// With -hold it opens connections, and keeps them until its standard input ends; the requests, if
// there are any, are spread over -in-flight streams, which stay open; replies are counted.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
)

type options struct {
	address     string
	method      string
	requests    string
	connections int
	inFlight    int
	seconds     float64
	warmup      float64
	count       int64
	hold        bool
}

// result is what the program prints, in these units.
type result struct {
	Calls     int64            `json:"calls"` // that ended while it was measured
	Seconds   float64          `json:"seconds"`
	CallsPerS float64          `json:"calls_per_s"`
	P50Ms     float64          `json:"p50_ms"`
	P99Ms     float64          `json:"p99_ms"`
	P999Ms    float64          `json:"p999_ms"`
	MaxMs     float64          `json:"max_ms"`
	CPUUs     float64          `json:"cpu_us"`   // of this process, for a call
	Messages  int64            `json:"messages"` // of replies
	Bytes     int64            `json:"bytes"`    // of replies, without frames
	Errors    map[string]int64 `json:"errors"`   // calls that did not end with OK, by status
	Lost      int64            `json:"lost"`     // calls on connections that ended
	Example   string           `json:"example"`  // message of one of the errors
}

func main() {
	var given options
	flag.StringVar(&given.address, "address", "", "HOST:PORT")
	flag.StringVar(&given.method, "method", "", "path, such as /shalekv.v1.KV/Get")
	flag.StringVar(&given.requests, "requests", "", "file of messages, each after its length in 4 bytes, big-endian")
	flag.IntVar(&given.connections, "connections", 1, "")
	flag.IntVar(&given.inFlight, "in-flight", 1, "calls in flight, over all connections")
	flag.Float64Var(&given.seconds, "seconds", 1, "how long to measure, after the warm-up")
	flag.Float64Var(&given.warmup, "warmup", 0, "seconds before figures count")
	flag.Int64Var(&given.count, "count", 0, "end after so many calls; 0: after -seconds")
	flag.BoolVar(&given.hold, "hold", false, "open connections and streams, and keep them until stdin ends")
	flag.Parse()
	if err := run(given); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(given options) error {
	bodies, err := readRequests(given.requests)
	if err != nil {
		return err
	}
	if given.hold {
		return hold(given, bodies)
	}
	if len(bodies) == 0 {
		return fmt.Errorf("there are no requests")
	}
	plan := newPlan(given, bodies)
	var waiting sync.WaitGroup
	failures := make([]error, given.connections)
	for n := range given.connections {
		share := given.inFlight / given.connections
		if n < given.inFlight%given.connections {
			share++
		}
		if share == 0 {
			continue
		}
		waiting.Add(1)
		go func() {
			defer waiting.Done()
			failures[n] = plan.drive(share)
		}()
	}
	waiting.Wait()
	for _, failure := range failures {
		if failure != nil {
			return failure
		}
	}
	return json.NewEncoder(os.Stdout).Encode(plan.result())
}

// hold opens all connections, with a stream for each request, and says "ready".
func hold(given options, bodies [][]byte) error {
	lines := make([]*line, 0, given.connections)
	var taken counts
	for n := range given.connections {
		held, err := dial(given.address, given.method, &taken)
		if err != nil {
			return err
		}
		if err := held.settle(); err != nil {
			return err
		}
		for stream := n; stream < min(given.inFlight, len(bodies)); stream += given.connections {
			held.open(spread(bodies, stream, given.inFlight), time.Now(), false)
		}
		if err := held.flush(); err != nil {
			return err
		}
		lines = append(lines, held)
	}
	for _, held := range lines {
		go func() {
			if err := held.serve(nil); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}()
	}
	fmt.Println("ready")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result{Messages: taken.messages.Load(), Bytes: taken.bytes.Load()})
}

// spread returns the requests of one of so many streams, one after the other.
func spread(bodies [][]byte, stream int, streams int) []byte {
	var all []byte
	for n := stream; n < len(bodies); n += streams {
		all = append(all, bodies[n]...)
	}
	return all
}

func cpuSeconds() float64 {
	var used syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &used) != nil {
		return 0
	}
	return seconds(used.Utime) + seconds(used.Stime)
}

func seconds(value syscall.Timeval) float64 {
	return (time.Duration(value.Sec)*time.Second + time.Duration(value.Usec)*time.Microsecond).Seconds()
}
