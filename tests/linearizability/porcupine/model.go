package main

import (
	"encoding/binary"
	"encoding/hex"
	"math"

	"github.com/anishathalye/porcupine"
)

// The model of ../model.py, written again: what a database of a few keys may answer. It follows
// every state that is possible at once, where the other tries one after another.

const (
	keysMax      = 16
	counterBytes = 8
	absent       = "-" // no value in hexadecimal
	anySeq       = math.MaxUint64
)

// One key. Its sequence number is known when both bounds are equal.
type cell struct {
	value  string
	seqMin uint64
	seqMax uint64
}

type state struct {
	newestSeq uint64 // the least that the number of the last commit can be
	cells     [keysMax]cell
}

// A way in which the tests of an operation may turn out.
type judgement struct {
	state state
	holds bool
}

func model(keys int) porcupine.Model {
	if keys > keysMax {
		panic("more keys than a state has")
	}
	nondeterministic := porcupine.NondeterministicModel{
		Init: func() []interface{} {
			var initial state
			for i := range initial.cells {
				initial.cells[i].value = absent
			}
			return []interface{}{initial}
		},
		Step: func(from, input, _ interface{}) []interface{} {
			var found []interface{}
			for _, each := range step(from.(state), input.(*call)) {
				found = append(found, each)
			}
			return found
		},
		Equal: func(one, other interface{}) bool { return one.(state) == other.(state) },
	}
	return nondeterministic.ToModel()
}

func step(from state, c *call) []state {
	if c.Reply == nil {
		return stepUnknown(from, c)
	}
	var found []state
	for _, each := range judgeTests(from, c.Tests) {
		if c.Reply.NotACounter {
			if _, ok := changesOf(each.state, c.branch(each.holds), nil); !ok {
				found = append(found, each.state)
			}
			continue
		}
		if each.holds != c.Reply.Succeeded {
			continue
		}
		var after state
		var ok bool
		if each.holds || !c.Refuses {
			after, ok = answer(each.state, c.branch(each.holds), c.Reply)
		} else {
			after, ok = refuse(each.state, c.Tests[0], c.Reply.FoundSeq)
		}
		if ok {
			found = append(found, after)
		}
	}
	return found
}

// An operation whose outcome is unknown does what it can do at its moment. One that never happened
// stands behind all others, where nobody sees what it did: its end is later than every other.
func stepUnknown(from state, c *call) []state {
	var found []state
	for _, each := range judgeTests(from, c.Tests) {
		changes, ok := changesOf(each.state, c.branch(each.holds), nil)
		if !ok || len(changes) == 0 {
			found = append(found, each.state)
		} else if after, ok := commit(each.state, changes, 0); ok {
			found = append(found, after)
		}
	}
	return found
}

func (c *call) branch(holds bool) []action {
	if holds {
		return c.Then
	}
	return c.Otherwise
}

func judgeTests(from state, tests []test) []judgement {
	passed := []state{from}
	var judged []judgement
	for _, t := range tests {
		var holding []state
		for _, each := range passed {
			holds, fails := judgeTest(each, t)
			holding = append(holding, holds...)
			for _, failed := range fails {
				judged = append(judged, judgement{failed, false})
			}
		}
		passed = holding
	}
	for _, each := range passed {
		judged = append(judged, judgement{each, true})
	}
	return judged
}

// The states in which a test holds, and those in which it fails.
func judgeTest(from state, t test) (holds, fails []state) {
	found := from.cells[t.Key]
	var is bool
	switch t.Kind {
	case "exists":
		is = (found.value != absent) == t.Wanted
	case "value":
		is = found.value == t.Value
	case "seq":
		switch {
		case found.value == absent || t.Seq < found.seqMin || t.Seq > found.seqMax:
			is = false
		case found.seqMin == found.seqMax:
			is = true
		default: // it may be this number or another
			if known, ok := know(from, t.Key, t.Seq); ok {
				holds = append(holds, known)
			}
			return holds, []state{from}
		}
	default:
		panic("unknown test: " + t.Kind)
	}
	if is {
		return []state{from}, nil
	}
	return nil, []state{from}
}

func answer(from state, actions []action, r *reply) (state, bool) {
	if len(actions) != len(r.Results) {
		return from, false
	}
	known := from
	for i, each := range actions {
		if each.Kind != "get" {
			continue
		}
		shown, found := r.Results[i], known.cells[each.Key]
		if shown.Found != (found.value != absent) {
			return from, false
		}
		if !shown.Found {
			continue
		}
		if shown.Value != found.value {
			return from, false
		}
		if shown.Seq != 0 {
			var ok bool
			if known, ok = know(known, each.Key, shown.Seq); !ok {
				return from, false
			}
		}
	}
	changes, ok := changesOf(known, actions, r.Results)
	if !ok || len(changes) == 0 {
		return known, ok
	}
	return commit(known, changes, r.Seq)
}

// What the actions make of the keys; false: an add meets no counter, or can't have this result.
func changesOf(from state, actions []action, results []result) (map[int]string, bool) {
	changes := map[int]string{}
	for i, each := range actions {
		switch each.Kind {
		case "get":
		case "put":
			changes[each.Key] = each.Value
		case "delete":
			changes[each.Key] = absent
		case "add":
			before, ok := changes[each.Key]
			if !ok {
				before = from.cells[each.Key].value
			}
			var counter [counterBytes]byte
			if before != absent {
				if len(before) != hex.EncodedLen(counterBytes) {
					return nil, false
				}
				if _, err := hex.Decode(counter[:], []byte(before)); err != nil {
					panic(err)
				}
			}
			total := int64(binary.LittleEndian.Uint64(counter[:])) + each.Delta
			if results != nil && results[i].Counter != total {
				return nil, false
			}
			binary.LittleEndian.PutUint64(counter[:], uint64(total))
			changes[each.Key] = hex.EncodeToString(counter[:])
		default:
			panic("unknown action: " + each.Kind)
		}
	}
	return changes, true
}

// What is known when an operation was refused because it met this number.
func refuse(from state, t test, foundSeq int64) (state, bool) {
	if foundSeq < 0 {
		return from, true
	}
	isAbsent := from.cells[t.Key].value == absent
	if isAbsent || foundSeq == 0 {
		return from, isAbsent && foundSeq == 0
	}
	if t.Kind == "seq" && t.Seq == uint64(foundSeq) {
		return from, false
	}
	return know(from, t.Key, uint64(foundSeq))
}

// The number of a key's value is this, for all keys of its commit; false: it can't be.
func know(from state, key int, seq uint64) (state, bool) {
	found := from.cells[key]
	if seq < found.seqMin || seq > found.seqMax {
		return from, false
	}
	if found.seqMin == found.seqMax {
		return from, true
	}
	known := from
	for i, each := range from.cells {
		if each.seqMin == found.seqMin && each.seqMax == found.seqMax {
			known.cells[i].seqMin, known.cells[i].seqMax = seq, seq
		}
	}
	known.newestSeq = max(from.newestSeq, seq)
	return known, true
}

// The state after a commit, whose number is not known if it is 0; false: it is not the greatest.
func commit(from state, changes map[int]string, seq uint64) (state, bool) {
	after := from
	var bounds cell
	if seq == 0 {
		after.newestSeq = from.newestSeq + 1
		bounds = cell{seqMin: after.newestSeq, seqMax: anySeq}
	} else {
		if seq <= from.newestSeq {
			return from, false
		}
		after.newestSeq = seq
		bounds = cell{seqMin: seq, seqMax: seq}
		for i := range after.cells { // what came before has a smaller number
			if after.cells[i].seqMax == anySeq {
				after.cells[i].seqMax = seq - 1
			}
		}
	}
	for key, value := range changes {
		if value == absent {
			after.cells[key] = cell{value: absent}
		} else {
			after.cells[key] = cell{value, bounds.seqMin, bounds.seqMax}
		}
	}
	return after, true
}
