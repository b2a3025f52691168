package main

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	subBits   = 6 // of a bucket of latencies: 64 for each power of two, which is 1.5 %
	subCount  = 1 << subBits
	reconnect = 20 * time.Millisecond
	patience  = 5 * time.Second // for a server that accepts no connection
)

type counts struct {
	messages atomic.Int64
	bytes    atomic.Int64
}

// plan is what all connections do together, and what they found.
type plan struct {
	given    options
	bodies   [][]byte
	next     atomic.Int64 // number of the next request
	began    time.Time
	measured time.Time // from when on figures count
	ends     time.Time
	taken    counts
	warming  sync.Once

	mutex      sync.Mutex
	histogram  [64 * subCount]int64
	calls      int64
	longest    time.Duration
	errors     map[string]int64
	lost       int64
	example    string
	last       time.Time // when the last counted call ended
	cpuBefore  float64
	bytesEarly int64 // of replies before figures counted
	msgsEarly  int64
}

func newPlan(given options, bodies [][]byte) *plan {
	now := time.Now()
	measured := now.Add(time.Duration(given.warmup * float64(time.Second)))
	ends := measured.Add(time.Duration(given.seconds * float64(time.Second)))
	made := &plan{given: given, bodies: bodies, began: now, measured: measured, ends: ends}
	made.errors = map[string]int64{}
	made.last = measured
	return made
}

// take returns the next request, nil when there are to be no more.
func (p *plan) take(now time.Time) []byte {
	number := p.next.Add(1) - 1
	if p.given.count > 0 {
		if number >= p.given.count {
			return nil
		}
	} else if now.After(p.ends) {
		return nil
	}
	return p.bodies[number%int64(len(p.bodies))]
}

// found is what one connection has found; it is merged into the plan at the end.
type found struct {
	histogram [64 * subCount]int64
	calls     int64
	longest   time.Duration
	errors    map[string]int64
	example   string
	last      time.Time
}

// drive keeps so many calls in flight on a connection, and on another one when it is lost.
func (p *plan) drive(inFlight int) error {
	own := &found{errors: map[string]int64{}}
	defer p.merge(own)
	refusedSince := time.Time{}
	for {
		connection, err := dial(p.given.address, p.given.method, &p.taken)
		if err != nil {
			now := time.Now()
			if refusedSince.IsZero() {
				refusedSince = now
			}
			if now.Sub(refusedSince) > patience {
				return err
			}
			time.Sleep(reconnect)
			continue
		}
		refusedSince = time.Time{}
		done, err := p.driveOne(connection, inFlight, own)
		connection.close()
		if done {
			return nil
		}
		p.mutex.Lock()
		p.lost += int64(len(connection.calls))
		if p.example == "" && err != nil {
			p.example = err.Error()
		}
		p.mutex.Unlock()
		if time.Now().After(p.ends) && p.given.count == 0 {
			return nil
		}
	}
}

func (p *plan) driveOne(connection *line, inFlight int, own *found) (bool, error) {
	if err := connection.settle(); err != nil {
		return false, err
	}
	begun := 0
	start := func(now time.Time) {
		if connection.isLeaving {
			return
		}
		if body := p.take(now); body != nil {
			connection.open(body, now, true)
			begun++
		}
	}
	now := time.Now()
	for range min(inFlight, connection.maxStreams) {
		start(now)
	}
	if begun == 0 {
		return true, nil
	}
	if err := connection.flush(); err != nil {
		return false, err
	}
	err := connection.serve(func(ended *call) {
		now := connection.now
		if !now.Before(p.measured) {
			p.warming.Do(p.beginMeasuring)
			own.add(now.Sub(ended.began), now)
			if ended.status != "0" {
				own.errors[ended.status]++
				own.example = ended.message
			}
		}
		start(now)
	})
	return err == nil && !connection.isLeaving, err
}

func (p *plan) beginMeasuring() {
	p.cpuBefore = cpuSeconds()
	p.bytesEarly = p.taken.bytes.Load()
	p.msgsEarly = p.taken.messages.Load()
}

func (f *found) add(took time.Duration, now time.Time) {
	f.calls++
	f.longest = max(f.longest, took)
	f.histogram[bucket(took)]++
	f.last = now
}

func (p *plan) merge(own *found) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for n, count := range own.histogram {
		p.histogram[n] += count
	}
	p.calls += own.calls
	p.longest = max(p.longest, own.longest)
	for status, count := range own.errors {
		p.errors[status] += count
	}
	if own.example != "" {
		p.example = own.example
	}
	if own.last.After(p.last) {
		p.last = own.last
	}
}

func (p *plan) result() result {
	lapsed := p.last.Sub(p.measured).Seconds()
	out := result{Calls: p.calls, Seconds: lapsed, Errors: p.errors, Lost: p.lost, Example: p.example}
	out.Messages = p.taken.messages.Load() - p.msgsEarly
	out.Bytes = p.taken.bytes.Load() - p.bytesEarly
	if p.calls == 0 {
		return out
	}
	out.CallsPerS = float64(p.calls) / lapsed
	out.CPUUs = (cpuSeconds() - p.cpuBefore) / float64(p.calls) * 1e6
	out.P50Ms, out.P99Ms, out.P999Ms = p.quantile(0.5), p.quantile(0.99), p.quantile(0.999)
	out.MaxMs = float64(p.longest) / 1e6
	return out
}

// quantile returns milliseconds.
func (p *plan) quantile(share float64) float64 {
	wanted := int64(share * float64(p.calls))
	for n, count := range p.histogram {
		wanted -= count
		if wanted < 0 {
			return float64(middle(n)) / 1e6
		}
	}
	return float64(p.longest) / 1e6
}

// bucket returns the number of the bucket of a latency: by its highest bits.
func bucket(took time.Duration) int {
	value := uint64(max(took, 1))
	shift := bits.Len64(value) - 1 - subBits
	if shift <= 0 {
		return int(value)
	}
	return shift<<subBits + int(value>>shift)
}

// middle returns nanoseconds in the middle of a bucket.
func middle(number int) uint64 {
	shift := number>>subBits - 1
	if shift <= 0 {
		return uint64(number)
	}
	return (uint64(number&(subCount-1)|subCount) << shift) + 1<<shift/2
}

// readRequests returns frames of gRPC: a flag, the length, and the message.
func readRequests(name string) ([][]byte, error) {
	if name == "" {
		return nil, nil
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var bodies [][]byte
	for len(data) > 0 {
		if len(data) < 4 || len(data)-4 < int(binary.BigEndian.Uint32(data)) {
			return nil, fmt.Errorf("%s ends within a request", name)
		}
		end := 4 + int(binary.BigEndian.Uint32(data))
		bodies = append(bodies, append([]byte{0}, data[:end]...))
		data = data[end:]
	}
	return bodies, nil
}
