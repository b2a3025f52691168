package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	bufferBytes   = 256 << 10
	streamWindow  = 16 << 20  // of replies, for each stream
	lineWindow    = 256 << 20 // of replies, for a connection
	defaultWindow = 65535
	frameBytes    = 16 << 10 // of requests: every server takes such frames
	streamsMax    = 1 << 30
)

// call is one call in flight.
type call struct {
	began    time.Time
	window   int64  // bytes that the server takes of its request
	unsent   []byte // rest of its request
	ends     bool   // the request ends the stream
	received int64  // bytes of the reply since the last WINDOW_UPDATE
	ahead    int    // bytes of the current message that are still to come
	prefix   []byte // begin of the next message, if less than its head is there
	status   string
	message  string
}

// line is a connection. One goroutine uses it.
type line struct {
	socket     net.Conn
	reader     *bufio.Reader
	writer     *bufio.Writer
	framer     *http2.Framer
	headers    bytes.Buffer
	encoder    *hpack.Encoder
	decoder    *hpack.Decoder
	fields     []hpack.HeaderField
	calls      map[uint32]*call
	spare      []*call
	waiting    []uint32 // streams whose requests are not sent whole
	nextID     uint32
	window     int64 // bytes that the server takes on this connection
	initial    int64 // window of a new stream
	maxStreams int
	received   int64
	now        time.Time // when the frames that are being handled came
	status     string    // of the block of headers that is being read
	message    string
	taken      *counts
	isLeaving  bool // the server has said GOAWAY
}

func dial(address string, method string, taken *counts) (*line, error) {
	socket, err := net.DialTimeout("tcp", address, patience)
	if err != nil {
		return nil, err
	}
	made := &line{
		socket: socket, reader: bufio.NewReaderSize(socket, bufferBytes),
		writer: bufio.NewWriterSize(socket, bufferBytes), calls: map[uint32]*call{}, nextID: 1,
		window: defaultWindow, initial: defaultWindow, maxStreams: streamsMax, taken: taken,
	}
	made.framer = http2.NewFramer(made.writer, made.reader)
	made.framer.SetReuseFrames()
	made.framer.SetMaxReadFrameSize(1 << 20)
	made.encoder = hpack.NewEncoder(&made.headers)
	made.decoder = hpack.NewDecoder(4096, made.field)
	made.fields = []hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"},
		{Name: ":path", Value: method}, {Name: ":authority", Value: address},
		{Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
		{Name: "user-agent", Value: "shalekv-bench"},
	}
	return made, nil
}

// settle exchanges the preface and settings.
func (l *line) settle() error {
	if _, err := l.writer.WriteString(http2.ClientPreface); err != nil {
		return err
	}
	settings := []http2.Setting{
		{ID: http2.SettingEnablePush, Val: 0},
		{ID: http2.SettingInitialWindowSize, Val: streamWindow},
		{ID: http2.SettingMaxFrameSize, Val: 1 << 20},
	}
	if err := l.framer.WriteSettings(settings...); err != nil {
		return err
	}
	if err := l.framer.WriteWindowUpdate(0, lineWindow-defaultWindow); err != nil {
		return err
	}
	if err := l.flush(); err != nil {
		return err
	}
	for {
		frame, err := l.framer.ReadFrame()
		if err != nil {
			return fmt.Errorf("no settings came: %w", err)
		}
		if err := l.control(frame); err != nil {
			return err
		}
		if settings, ok := frame.(*http2.SettingsFrame); ok && !settings.IsAck() {
			return l.flush()
		}
	}
}

func (l *line) close() { l.socket.Close() }

func (l *line) flush() error { return l.writer.Flush() }

// open begins a call, which is unary when its request ends the stream.
func (l *line) open(body []byte, now time.Time, ends bool) {
	l.send(l.begin(now, ends), body)
}

func (l *line) begin(now time.Time, ends bool) uint32 {
	id := l.nextID
	l.nextID += 2
	var one *call
	if count := len(l.spare); count > 0 {
		one, l.spare = l.spare[count-1], l.spare[:count-1]
	} else {
		one = &call{}
	}
	*one = call{began: now, window: l.initial, ends: ends}
	l.calls[id] = one
	l.headers.Reset()
	for _, field := range l.fields {
		l.encoder.WriteField(field)
	}
	// Errors of writing appear at the next flush.
	l.framer.WriteHeaders(http2.HeadersFrameParam{
		StreamID: id, BlockFragment: l.headers.Bytes(), EndHeaders: true,
	})
	return id
}

// send sends as much of a request as the windows allow, and keeps the rest.
func (l *line) send(id uint32, body []byte) {
	one := l.calls[id]
	for {
		size := min(int64(len(body)), frameBytes, one.window, l.window)
		if size <= 0 {
			one.unsent = body
			l.waiting = append(l.waiting, id)
			return
		}
		last := size == int64(len(body))
		l.framer.WriteData(id, last && one.ends, body[:size])
		one.window -= size
		l.window -= size
		body = body[size:]
		if last {
			one.unsent = nil
			return
		}
	}
}

// resume sends what had to wait for a window.
func (l *line) resume() {
	waiting := l.waiting
	l.waiting = nil
	for _, id := range waiting {
		if one, ok := l.calls[id]; ok && one.unsent != nil {
			l.send(id, one.unsent)
		}
	}
}

// serve calls `ended` for each call that ends, until none is in flight: then it returns nil.
// Without `ended` it serves until the connection is lost.
func (l *line) serve(ended func(*call)) error {
	for {
		if l.reader.Buffered() == 0 {
			if err := l.flush(); err != nil {
				return err
			}
			if _, err := l.reader.Peek(1); err != nil {
				return err
			}
			l.now = time.Now()
		}
		frame, err := l.framer.ReadFrame()
		if err != nil {
			return err
		}
		if err := l.handle(frame, ended); err != nil {
			return err
		}
		if len(l.calls) == 0 && ended != nil {
			return l.flush()
		}
	}
}

func (l *line) handle(frame http2.Frame, ended func(*call)) error {
	id := frame.Header().StreamID
	switch frame := frame.(type) {
	case *http2.DataFrame:
		l.data(id, frame)
		if frame.StreamEnded() {
			l.end(id, ended)
		}
	case *http2.HeadersFrame:
		if err := l.block(frame); err != nil {
			return err
		}
		if one, ok := l.calls[id]; ok && l.status != "" {
			one.status, one.message = l.status, l.message
		}
		if frame.StreamEnded() {
			l.end(id, ended)
		}
	case *http2.RSTStreamFrame:
		if one, ok := l.calls[id]; ok {
			one.status = "RST_STREAM " + frame.ErrCode.String()
			l.end(id, ended)
		}
	case *http2.GoAwayFrame:
		l.isLeaving = true
		if frame.ErrCode != http2.ErrCodeNo {
			return fmt.Errorf("GOAWAY %v: %s", frame.ErrCode, frame.DebugData())
		}
	default:
		return l.control(frame)
	}
	return nil
}

func (l *line) end(id uint32, ended func(*call)) {
	one, ok := l.calls[id]
	if !ok {
		return
	}
	delete(l.calls, id)
	if one.status == "" {
		one.status = "no status"
	}
	if ended != nil {
		ended(one)
	}
	l.spare = append(l.spare, one)
}

// block decodes a block of headers, with its continuations.
func (l *line) block(frame *http2.HeadersFrame) error {
	l.status, l.message = "", ""
	if _, err := l.decoder.Write(frame.HeaderBlockFragment()); err != nil {
		return err
	}
	ends := frame.StreamEnded()
	for done := frame.HeadersEnded(); !done; {
		next, err := l.framer.ReadFrame()
		if err != nil {
			return err
		}
		more, ok := next.(*http2.ContinuationFrame)
		if !ok {
			return errors.New("a block of headers is not continued")
		}
		if _, err := l.decoder.Write(more.HeaderBlockFragment()); err != nil {
			return err
		}
		done = more.HeadersEnded()
	}
	if ends && l.status == "" {
		l.status = "no status"
	}
	return l.decoder.Close()
}

func (l *line) field(field hpack.HeaderField) {
	switch field.Name {
	case "grpc-status":
		l.status = field.Value
	case "grpc-message":
		l.message = field.Value
	}
}

func (l *line) data(id uint32, frame *http2.DataFrame) {
	size := int64(frame.Header().Length)
	l.received += size
	if l.received > lineWindow/2 {
		l.framer.WriteWindowUpdate(0, uint32(l.received))
		l.received = 0
	}
	one, ok := l.calls[id]
	if !ok {
		return
	}
	one.received += size
	if one.received > streamWindow/2 && !frame.StreamEnded() {
		l.framer.WriteWindowUpdate(id, uint32(one.received))
		one.received = 0
	}
	l.taken.bytes.Add(int64(len(frame.Data())))
	l.taken.messages.Add(one.messages(frame.Data()))
}

// messages returns how many messages of gRPC begin in these bytes.
func (c *call) messages(data []byte) int64 {
	var count int64
	for len(data) > 0 {
		if c.ahead > 0 {
			skipped := min(c.ahead, len(data))
			c.ahead -= skipped
			data = data[skipped:]
			continue
		}
		wanted := min(5-len(c.prefix), len(data))
		c.prefix = append(c.prefix, data[:wanted]...)
		data = data[wanted:]
		if len(c.prefix) == 5 {
			c.ahead = int(binary.BigEndian.Uint32(c.prefix[1:]))
			c.prefix = c.prefix[:0]
			count++
		}
	}
	return count
}

// control answers what concerns the connection, and takes windows.
func (l *line) control(frame http2.Frame) error {
	switch frame := frame.(type) {
	case *http2.SettingsFrame:
		if frame.IsAck() {
			return nil
		}
		err := frame.ForeachSetting(l.set)
		if err != nil {
			return err
		}
		err = l.framer.WriteSettingsAck()
		l.resume()
		return err
	case *http2.PingFrame:
		if frame.IsAck() {
			return nil
		}
		return l.framer.WritePing(true, frame.Data)
	case *http2.WindowUpdateFrame:
		if id := frame.Header().StreamID; id == 0 {
			l.window += int64(frame.Increment)
		} else if one, ok := l.calls[id]; ok {
			one.window += int64(frame.Increment)
		}
		l.resume()
	}
	return nil
}

func (l *line) set(setting http2.Setting) error {
	switch setting.ID {
	case http2.SettingInitialWindowSize:
		grown := int64(setting.Val) - l.initial
		l.initial = int64(setting.Val)
		for _, one := range l.calls {
			one.window += grown
		}
	case http2.SettingMaxConcurrentStreams:
		l.maxStreams = int(min(setting.Val, streamsMax))
	case http2.SettingHeaderTableSize:
		l.encoder.SetMaxDynamicTableSizeLimit(setting.Val)
	}
	return nil
}
