/* A cheap engine for overhead benches: canned OpenAI answers, so that it is not what is measured.
 *
 *   engine PORT CHUNKS GAP_US
 *
 * A body with "stream":true is answered by CHUNKS server-sent events, one a tick of GAP_US for
 * all running streams together, as an engine's iterations do (GAP_US 0: as fast as it goes).
 * Everything else gets one small JSON answer at once. GET gets 200. One thread, epoll.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <signal.h>
#include <unistd.h>

#define MAX_FD 65536

typedef struct {
  char *in;
  size_t used, room;
  int left; /* chunks still to send; 0 when idle */
  int slot; /* place in running[] */
} conn;

static conn *conns[MAX_FD];
static int running[MAX_FD], n_running;
static int chunks, listener, epfd;
static long gap_us;
static char whole[4096], event[512], last[1024];
static size_t whole_len, event_len, last_len;

static const char HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    "transfer-encoding: chunked\r\n\r\n";

static size_t chunked(char *out, const char *data) {
  return sprintf(out, "%zx\r\n%s\r\n", strlen(data), data);
}

static void prepare(void) {
  const char *json =
      "{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"bench-model\","
      "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"A short answer of a "
      "few words that an engine might give to a question.\"},\"logprobs\":null,\"finish_reason\":"
      "\"stop\"}],\"usage\":{\"prompt_tokens\":400,\"completion_tokens\":16,\"total_tokens\":416}}";
  whole_len = sprintf(whole,
                      "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                      strlen(json), json);
  event_len = chunked(event,
                      "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,"
                      "\"model\":\"bench-model\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},"
                      "\"logprobs\":null,\"finish_reason\":null}]}\n\n");
  last_len = chunked(last,
                     "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,"
                     "\"model\":\"bench-model\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" end\"},"
                     "\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n");
  last_len += chunked(last + last_len,
                      "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,"
                      "\"model\":\"bench-model\",\"choices\":[],\"usage\":{\"prompt_tokens\":400,"
                      "\"completion_tokens\":64,\"total_tokens\":464}}\n\ndata: [DONE]\n\n");
  last_len += sprintf(last + last_len, "0\r\n\r\n");
}

static void drop(int fd) {
  conn *c = conns[fd];
  if (c->left) {
    int moved = running[--n_running];
    running[c->slot] = moved;
    conns[moved]->slot = c->slot;
  }
  free(c->in);
  free(c);
  conns[fd] = NULL;
  close(fd);
}

static void put(int fd, const char *data, size_t len) {
  while (len) {
    ssize_t n = send(fd, data, len, MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN) { usleep(50); continue; }
    if (n < 0) return; /* the read side will notice */
    data += n;
    len -= n;
  }
}

static void next_chunk(int fd) {
  conn *c = conns[fd];
  if (--c->left) {
    put(fd, event, event_len);
    return;
  }
  int moved = running[--n_running];
  running[c->slot] = moved;
  conns[moved]->slot = c->slot;
  put(fd, last, last_len);
}

static void answer(int fd, conn *c, const char *body, size_t len) {
  int stream = memmem(body, len, "\"stream\":true", 13) || memmem(body, len, "\"stream\": true", 14);
  if (!stream) {
    put(fd, whole, whole_len);
    return;
  }
  put(fd, HEAD, sizeof HEAD - 1);
  c->left = chunks;
  c->slot = n_running;
  running[n_running++] = fd;
  if (!gap_us)
    while (conns[fd] && c->left) next_chunk(fd);
}

static void readable(int fd) {
  conn *c = conns[fd];
  for (;;) {
    if (c->room - c->used < 65536) c->in = realloc(c->in, c->room = c->room * 2 + 131072);
    ssize_t n = recv(fd, c->in + c->used, c->room - c->used - 1, 0);
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) { drop(fd); return; }
    c->used += n;
  }
  while (c->used) {
    c->in[c->used] = 0;
    char *end = memmem(c->in, c->used, "\r\n\r\n", 4);
    if (!end) return;
    size_t head = end + 4 - c->in, length = 0;
    char *field = strcasestr(c->in, "\r\ncontent-length:");
    if (field && field < end) length = strtoul(field + 17, NULL, 10);
    if (c->used < head + length) return;
    answer(fd, c, c->in + head, length);
    if (!conns[fd]) return;
    c->used -= head + length;
    memmove(c->in, c->in + head + length, c->used);
  }
}

static void accept_all(void) {
  int fd, one = 1;
  while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    if (fd >= MAX_FD) { close(fd); continue; }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    conns[fd] = calloc(1, sizeof(conn));
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &e);
  }
}

int main(int argc, char **argv) {
  if (argc != 4) { fprintf(stderr, "usage: engine PORT CHUNKS GAP_US\n"); return 2; }
  signal(SIGPIPE, SIG_IGN);
  chunks = atoi(argv[2]);
  gap_us = atol(argv[3]);
  prepare();
  int one = 1;
  listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])),
                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 4096)) {
    perror("engine");
    return 1;
  }
  epfd = epoll_create1(0);
  struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, events[512];
  epoll_ctl(epfd, EPOLL_CTL_ADD, listener, &e);
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  if (gap_us) {
    struct itimerspec spec = {{gap_us / 1000000, gap_us % 1000000 * 1000},
                              {gap_us / 1000000, gap_us % 1000000 * 1000}};
    timerfd_settime(timer, 0, &spec, NULL);
    e.data.fd = timer;
    epoll_ctl(epfd, EPOLL_CTL_ADD, timer, &e);
  }
  for (;;) {
    int n = epoll_wait(epfd, events, 512, -1);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      if (fd == listener) accept_all();
      else if (fd == timer) {
        unsigned long long ticks;
        if (read(timer, &ticks, 8) == 8)
          for (int k = n_running - 1; k >= 0; k--) next_chunk(running[k]);
      } else if (conns[fd]) readable(fd);
    }
  }
}
